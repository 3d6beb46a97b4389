"""Experiments: small programs that use policyopt to look at the literature's claims."""
