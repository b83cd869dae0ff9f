"""Publishing a policy version from the learners to the engines."""
