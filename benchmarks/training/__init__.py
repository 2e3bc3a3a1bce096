"""CPU benchmarks of training, compared with Hugging Face and between reduction strategies."""
