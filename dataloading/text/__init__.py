"""Text processing: Wikipedia articles, clean-up, sentence splitting and WordPiece tokenization."""
