"""A Ray session: joined or started, watched until its driver ends, and removed with what killed processes left."""
