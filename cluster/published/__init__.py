"""Time to train as others have published it: a cost model fitted to their results, and its predictions of other machines."""
