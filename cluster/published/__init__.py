"""What published MLPerf results tell: parameters of machines, hyperparameters, and predictions of submissions."""
