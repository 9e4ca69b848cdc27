"""One worker's end of a group: makes calls, serves calls from others, notices which peers are gone."""
