"""Check folders of logs and whole submissions."""
