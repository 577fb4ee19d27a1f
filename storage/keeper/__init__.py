"""The keeper: a process beside the workers that holds their checkpoints and publishes them."""
