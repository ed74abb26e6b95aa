"""The public classes `DeviceDict` and `TypedDeviceDict`."""
