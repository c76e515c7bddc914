"""What the router shows of itself: metrics, traces, status, the live page."""
