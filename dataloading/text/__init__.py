"""Text: Wikipedia's articles, clean-up, sentences, WordPiece."""
