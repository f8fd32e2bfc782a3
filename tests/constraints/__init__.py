"""Constraints against JSON-Schema-Test-Suite, random schemas and a real model; not part of the default tests."""
