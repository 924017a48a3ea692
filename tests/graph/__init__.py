"""Kunlun Graph: recording and replaying steps."""
