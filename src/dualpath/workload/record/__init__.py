"""Records live traffic as a trace: a proxy for requests, and the sessions that they form."""
