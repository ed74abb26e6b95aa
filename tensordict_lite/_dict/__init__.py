"""`DeviceDict` and `TypedDeviceDict`: what users hold in their hands."""
