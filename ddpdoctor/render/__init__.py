"""Turn findings and runs into text, HTML and JSON."""
