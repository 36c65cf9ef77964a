"""Requests that are safe to retry: middlewares, decorators and clients around one pure policy (`rules`)."""
