"""Messages and stubs, made from the .proto when this is imported. A project commits what grpc_tools.protoc writes."""

from __future__ import annotations

from typing import Any

import grpc

orders: Any
orders_grpc: Any
orders, orders_grpc = grpc.protos_and_services("examples/grpc_orders/orders.proto")
