from toy_project import bare, project

__all__ = ["bare", "project"]
