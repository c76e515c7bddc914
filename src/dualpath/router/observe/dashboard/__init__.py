"""The live page of the router at ``/dashboard``, and the figures it draws."""
