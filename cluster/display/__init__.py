"""The view of a cluster for people: in a terminal and as a page."""
