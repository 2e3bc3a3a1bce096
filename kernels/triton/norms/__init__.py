"""Layer norms in Triton, fused with the operations before and after them."""
