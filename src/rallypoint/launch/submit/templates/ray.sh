#!/bin/bash
exec $ray job submit --metadata-json '{"job_name": "$name"}' $options -- $command
