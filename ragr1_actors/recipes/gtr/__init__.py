"""GTR-T: questions are answered by SQL that the policy writes."""
