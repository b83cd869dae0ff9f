"""What is done with the system as a whole: the claims of its recipes are put to the test."""
