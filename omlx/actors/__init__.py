"""Thin shells around the pure rooms: messages in, calls, messages out. No policy lives here."""
