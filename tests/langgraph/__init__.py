"""Tests of the LangGraph integration."""
