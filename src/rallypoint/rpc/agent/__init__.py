"""One worker's end of a group: makes calls, serves those of others, notices who is gone."""
