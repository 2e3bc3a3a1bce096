"""CPU benchmarks that compare our training with Hugging Face's, and reduction strategies with one another."""
