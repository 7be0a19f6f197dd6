"""One run on several nodes, whose ddpdoctor processes find each other and exchange records."""
