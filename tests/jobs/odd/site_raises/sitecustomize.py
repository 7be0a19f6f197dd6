raise ValueError("the site is broken")
