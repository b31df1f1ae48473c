"""Text in, evidence out: what broke, who is to blame, and what to do first. Pure."""
