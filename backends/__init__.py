"""The bundled backends, one file each, found through the `rulec.backends` entry points like any other backend."""
