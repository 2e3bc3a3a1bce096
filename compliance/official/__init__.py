"""Asks the official tools of mlperf-logging and reads their answers."""
