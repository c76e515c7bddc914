"""The replay client: agents against an endpoint, every turn measured."""
