"""Documents packed into one sequence do not see one another."""
