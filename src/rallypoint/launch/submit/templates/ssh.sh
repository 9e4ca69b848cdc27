#!/bin/bash
# Starts the job on the first host, where it goes on by itself, and shows its output.
exec $ssh $host $remote <<'END'
$orders
END
