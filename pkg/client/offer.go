package client

import (
	"context"
	"fmt"
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Offer is what a driver reports about itself. The fields of a service that the socket
// does not have are nil.
type Offer struct {
	Info       *csi.GetPluginInfoResponse
	NotReady   string // why; "" when it is ready
	Plugin     *csi.GetPluginCapabilitiesResponse
	Controller *csi.ControllerGetCapabilitiesResponse
	Node       *csi.NodeGetCapabilitiesResponse
	NodeInfo   *csi.NodeGetInfoResponse
}

// Offer asks a driver for everything that it reports about itself.
func (c *Client) Offer(ctx context.Context) (*Offer, error) {
	o := &Offer{}
	var err error
	if o.Info, err = c.Identity.GetPluginInfo(ctx, &csi.GetPluginInfoRequest{}); err != nil {
		return nil, explain(err, "GetPluginInfo")
	}
	if o.Plugin, err = c.Identity.GetPluginCapabilities(ctx, &csi.GetPluginCapabilitiesRequest{}); err != nil {
		return nil, explain(err, "GetPluginCapabilities")
	}
	if o.Controller, err = optional(c.Controller.ControllerGetCapabilities(ctx, &csi.ControllerGetCapabilitiesRequest{})); err != nil {
		return nil, explain(err, "ControllerGetCapabilities")
	}
	if o.Node, err = optional(c.Node.NodeGetCapabilities(ctx, &csi.NodeGetCapabilitiesRequest{})); err != nil {
		return nil, explain(err, "NodeGetCapabilities")
	}
	if o.NodeInfo, err = optional(c.Node.NodeGetInfo(ctx, &csi.NodeGetInfoRequest{})); err != nil {
		return nil, explain(err, "NodeGetInfo")
	}
	switch ready, err := c.Identity.Probe(ctx, &csi.ProbeRequest{}); {
	case err != nil:
		o.NotReady = fmt.Sprintf("%s: %s", status.Code(err), status.Convert(err).Message())
	case ready.GetReady() != nil && !ready.GetReady().GetValue(): // CSI spec v1.13, Probe: unset means ready
		o.NotReady = "it is starting"
	}
	return o, nil
}

// optional turns the answer of a missing service into nil.
func optional[T any](resp *T, err error) (*T, error) {
	if status.Code(err) == codes.Unimplemented {
		return nil, nil
	}
	return resp, err
}

// DriverName asks for the name of the driver.
func (c *Client) DriverName(ctx context.Context) (string, error) {
	info, err := c.Identity.GetPluginInfo(ctx, &csi.GetPluginInfoRequest{})
	if err != nil {
		return "", explain(err, "GetPluginInfo")
	}
	return info.GetName(), nil
}

func (c *Client) nodeOffers(ctx context.Context, want csi.NodeServiceCapability_RPC_Type) (bool, error) {
	resp, err := optional(c.Node.NodeGetCapabilities(ctx, &csi.NodeGetCapabilitiesRequest{}))
	if err != nil {
		return false, explain(err, "NodeGetCapabilities")
	}
	return slices.ContainsFunc(resp.GetCapabilities(), func(have *csi.NodeServiceCapability) bool { return have.GetRpc().GetType() == want }), nil
}

func (c *Client) controllerOffers(ctx context.Context, want csi.ControllerServiceCapability_RPC_Type) (bool, error) {
	resp, err := optional(c.Controller.ControllerGetCapabilities(ctx, &csi.ControllerGetCapabilitiesRequest{}))
	if err != nil {
		return false, explain(err, "ControllerGetCapabilities")
	}
	return slices.ContainsFunc(resp.GetCapabilities(), func(have *csi.ControllerServiceCapability) bool { return have.GetRpc().GetType() == want }), nil
}

// needController returns an error, which names the capability, unless it is offered.
func (c *Client) needController(ctx context.Context, want csi.ControllerServiceCapability_RPC_Type) error {
	offered, err := c.controllerOffers(ctx, want)
	if err == nil && !offered {
		err = notOffered("controller", want)
	}
	return err
}

// needNode is needController for the node service.
func (c *Client) needNode(ctx context.Context, want csi.NodeServiceCapability_RPC_Type) error {
	offered, err := c.nodeOffers(ctx, want)
	if err == nil && !offered {
		err = notOffered("node", want)
	}
	return err
}

func notOffered(service string, want fmt.Stringer) error {
	return fmt.Errorf("the driver does not offer this: its %s service lacks the capability %s (`volume capabilities` shows what it has)", service, want)
}
