"""What makes a run outlive failures: checkpoints, resume, restarts, a safe end, saved models."""
