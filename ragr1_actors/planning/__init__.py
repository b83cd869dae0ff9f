"""What a run takes before it starts: its plan in memory, disk and time, the pace that it computes, and the checks."""
