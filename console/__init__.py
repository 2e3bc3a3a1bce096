"""The way out for text: what programs print, and the pieces of documents that hold names from outside."""
