"""What `fit` does before the first step: it finds, checks and builds what a run works with."""
