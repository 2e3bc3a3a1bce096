"""Cost model fitted to published MLPerf results, and its predictions of the time to train on other machines."""
