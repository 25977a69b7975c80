"""Producers: messages, their queues, requests and replies, transactions."""
