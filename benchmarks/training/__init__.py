"""CPU benchmarks that compare training with Hugging Face's, and reduction strategies with one another."""
