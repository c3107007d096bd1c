"""Scripts that run as processes of their own: the launcher of a sandbox, what serves and checks inside one, and graders that
may have to be killed. They import nothing of the package."""
