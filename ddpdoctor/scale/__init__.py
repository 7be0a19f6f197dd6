"""``ddpdoctor scale``: the same job at several sizes, and the reasons why it does not scale."""
