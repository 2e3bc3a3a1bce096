"""Layer norms in Triton, with what is before them and behind them in the same pass."""
