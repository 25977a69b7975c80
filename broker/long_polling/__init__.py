"""Requests that found nothing wait here, until somebody tells them that there is something."""
