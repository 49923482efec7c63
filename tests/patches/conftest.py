from toy_project import bare, project, templates

__all__ = ["bare", "project", "templates"]
