"""Ask the official tools of mlperf-logging and read their answers."""
