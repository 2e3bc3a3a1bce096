"""Text to samples: clean-up, the demo corpus, WordPiece, documents to samples."""
