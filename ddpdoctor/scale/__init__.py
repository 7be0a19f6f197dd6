"""``ddpdoctor scale``: the same job at several sizes, and what keeps it from scaling."""
