"""What the policy acts in: environments, actions, rewards and tasks."""
